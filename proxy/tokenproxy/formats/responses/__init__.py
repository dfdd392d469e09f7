"""`POST /v1/responses`: OpenAI's Responses, as a wire format of a turn.

| file | about |
|---|---|
| request.py | the fields of a request and its tools, as the fields of a chat completion |
| items.py | input items and their parts, as chat messages; ids of responses and items |
| output.py, answer.py | the output items of a turn; the response object and its stream |
| records.py | stored responses, and the items of earlier ones |
| format.py | all of it as a `Format` |
"""
