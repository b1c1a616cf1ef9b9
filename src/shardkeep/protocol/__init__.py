"""The protocol of torch's distributed checkpoint: its values, planners and storage interfaces."""
