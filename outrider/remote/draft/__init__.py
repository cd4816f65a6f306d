"""The draft service, which guesses for targets elsewhere, and the drafter that asks one."""
