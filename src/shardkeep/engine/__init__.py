"""How saves and loads are carried out: staging, writing, reading, verifying, and the saves in the background."""
