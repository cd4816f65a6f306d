"""Bodies of requests and answers, as pydantic models: what is checked, and what the OpenAPI document says."""
