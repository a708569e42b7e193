"""What reads a run back. Nothing that makes a run imports from here."""
