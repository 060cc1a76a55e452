"""`neuronpipe benchmark`: a matrix of models and shapes through the whole pipeline, reported in the published forms.

`run.py` measures, `results.py` keeps results and compares two runs, `report.py` writes the report.
"""
