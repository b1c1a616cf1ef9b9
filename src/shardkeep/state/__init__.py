"""State dicts before any byte moves: flatten, recognise leaves, find each rank's boxes."""
