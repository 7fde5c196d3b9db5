"""Datasets from local files.

files, file_kinds     find files of texts, records or tokens; their kinds, by name
text_files            open files, and read texts as UTF-8
record_files          records of all formats: json_records, table_records (CSV), arrow_records (parquet)
record_fields         the form, the text and the owner of a record
text_fields           the field of records that seems to hold the text
text, chat            tokenize texts and conversations
documents             documents of unequal length and their owners
document_packing      several documents in one row
users, user_names     all records of one user as one sample; spellings that are one user
corpus                from files to a dataset of records, users or packed rows
datasets              load windows or images by name or path
windows, images       windows over a stream of bytes or tokens; labelled images
units, nouns          the unit of privacy, and what there is, in words
person_fields         the field of records that seems to name a person
read_counts           counts of the samples that were read, and of those left out
mixed                 private data mixed with public data
held_out              units held out for evaluation
digest, repeated      a fingerprint of a dataset, and how many of its samples occur more than once
"""
