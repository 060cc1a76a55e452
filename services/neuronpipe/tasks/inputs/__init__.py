"""The kinds of input that models take, tokens and pixels: their checks, sizes and padding."""
