"""The presentation of a run: figures, the report page and the privacy statement."""
