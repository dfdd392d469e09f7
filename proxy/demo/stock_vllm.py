"""Run vLLM without the plugin: `python -m proxy.demo.stock_vllm MODEL [flags of vllm serve]`."""

import sys

from proxy.vllm_launcher import serve

if __name__ == "__main__":
    serve(sys.argv[1:], plugin=False)
