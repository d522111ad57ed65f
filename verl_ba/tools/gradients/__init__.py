"""`verl-ba gradients`: which aggregation's gradient agrees best with itself on a model and rollouts of one's own.

scores.py     the score gradient of every response, projected
measure.py    updates under every mode: split halves, signal to noise, what switching would change
report.py     tables, a figure, the page
command.py    arguments, progress, files
"""
