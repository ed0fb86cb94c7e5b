"""Tasks with answers that can be checked: mathematics, code that is run, and formats that are parsed."""
