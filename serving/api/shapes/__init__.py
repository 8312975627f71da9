"""What routes answer, for the OpenAPI document: models that describe, in a file for each kind of thing. Nothing is validated
against them while serving; the tests hold every answer that they get to them."""
