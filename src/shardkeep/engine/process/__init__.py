"""The process that writes: how it is started, watched and asked, and what it does."""
