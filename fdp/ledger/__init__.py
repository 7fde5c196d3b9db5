"""The ledger: what was spent on which data.

data_key     the secret key of the data's owner, and keyed fingerprints of data
book         the ledger file: every private run that was started, and how it ended
totals       the runs on the same data, composed
"""
