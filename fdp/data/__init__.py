"""Datasets from local files.

files, json_records   find files of texts or records, and read them
text, chat            tokenize texts and conversations
documents             documents of unequal length and their owners
document_packing      several documents in one row
users, user_names     all records of one user as one sample; spellings that are one user
corpus                from files to a dataset of records, users or packed rows
datasets              windows over a stream of bytes or tokens; images
units                 the unit of privacy in words
read_counts           counts of the samples that were read, and of those left out
held_out              units held out for evaluation
digest                a fingerprint of a dataset
"""
