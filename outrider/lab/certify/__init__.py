"""A certificate of losslessness for one pair of models with its settings, or for a server with
drafts: what is proved, what is tested and with which power."""

from outrider.extras import check_lab

check_lab("certify")
