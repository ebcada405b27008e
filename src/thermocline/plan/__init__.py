"""Heat, budget and topology turned into decisions: precision, copies and place of every row. Needs no card."""
