"""Run an agent with tools through the server: OPENAI_BASE_URL=... python agent_server.py [MODEL].

Start the server first, with a model that can call tools: mlxspec serve MODEL. Each turn sends
the whole conversation, and the model runs only what is new.
"""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,  # the arguments are valid under the schema
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str) -> str:
    """Stands in for a real tool."""
    return {"Paris": "sunny", "Oslo": "snow"}.get(city, "unknown")


client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]

for _ in range(5):  # at most 5 turns
    completion = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
    message = completion.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.to_dict())  # type: ignore[arg-type]  # a valid parameter
    for call in message.tool_calls:
        if call.type == "function":
            result = weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}): {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
