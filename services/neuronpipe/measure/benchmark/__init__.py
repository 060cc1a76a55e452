"""`neuronpipe benchmark`: a matrix of models and shapes through the whole pipeline, reported in the published forms.

`run.Run` measures, `results` is what is kept and sets two runs side by side, `report` is what is shown.
"""
