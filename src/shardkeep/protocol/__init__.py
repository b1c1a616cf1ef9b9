"""The protocol of torch's distributed checkpoint: its values, planners and storages, and what calls them in order."""
