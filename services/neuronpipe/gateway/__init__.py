"""The front: takes requests and passes them through the stages."""
