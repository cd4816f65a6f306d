"""OpenAI's and Anthropic's interfaces: requests read into generation requests, answers written as
the clients expect."""
