"""Datasets from local files.

files          which files hold text or records
text, chat     text and conversations to tokens
documents      documents of unequal length and their owners
users          all records of one user as one sample (``user_names``: when two names are one user)
document_packing   several documents in one row
corpus         from files to a dataset of whole units
datasets       byte and token windows, images
units          the unit of privacy in words
read_counts    what was read, and what was left out
digest         a fingerprint of a dataset
"""
