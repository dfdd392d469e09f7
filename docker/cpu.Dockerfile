# vLLM for CPU with tokenproxy inside it and SmolLM2-135M: needs no GPU and no model hub. Build from the root of the
# repository:
#
#     docker build -f docker/cpu.Dockerfile -t tokenproxy-cpu .
#     docker run -p 8100:8100 tokenproxy-cpu
FROM python:3.11-slim

# vLLM for CPU links against libnuma.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tokenproxy
COPY . .
RUN PIP_NO_CACHE_DIR=1 scripts/install

ENV PATH=/opt/tokenproxy/.venv/bin:$PATH
EXPOSE 8100
ENTRYPOINT ["tokenproxy"]
CMD ["demo", "--serve", "--host", "0.0.0.0", "--port", "8100"]
