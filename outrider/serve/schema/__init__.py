"""Bodies of requests and answers, as pydantic models, which check requests and make the OpenAPI
document."""
