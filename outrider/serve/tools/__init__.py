"""Tools in a chat: the formats of model families, grammars that enforce calls, and readers that
find calls in answers."""
