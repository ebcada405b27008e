"""Publishing: a trainer sends changed rows to running servers, and to the log of its checkpoint folder."""
