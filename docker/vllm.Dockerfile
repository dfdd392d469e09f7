# vLLM for GPUs with tokenproxy inside it as an endpoint plugin. Build from the root of the repository:
#
#     docker build -f docker/vllm.Dockerfile -t tokenproxy-vllm .
#     docker run --gpus all --ipc host -p 8100:8100 tokenproxy-vllm Qwen/Qwen3-0.6B --enable-auto-tool-choice ...
FROM vllm/vllm-openai:v0.32.0

COPY . /opt/tokenproxy
# vLLM's own packages stay as they are: the proxy goes in without its dependencies. All of them come with vLLM, and
# naming the ones that vLLM only has by way of others makes sure of it.
RUN uv pip install --system --no-deps /opt/tokenproxy \
    && uv pip install --system 'httptools>=0.6' 'redis>=6' 'uvloop>=0.21'

EXPOSE 8100
ENTRYPOINT ["tokenproxy", "vllm"]
CMD ["Qwen/Qwen3-0.6B", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
