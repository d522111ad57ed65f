# verl 0.9.1, vLLM, flash-attn and this package, on verl's own image: docker build -t verl_ba .
# The image has CUDA 13.0 (a driver of R580 or newer), Python 3.12, torch 2.11.0, vLLM 0.24.0 and flash-attn 2.8.3. verl itself
# is not in it, and its transformers and TransferQueue are too old for verl 0.9.1. Not built here: see docs/install.md.
ARG BASE=verlai/verl:vllm024.dev2
FROM ${BASE}

# The programs of LiveCodeBench are run in bubblewrap.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

# Versions that verl 0.9.1 asks for itself; torch, vLLM and flash-attn stay as the image has them.
RUN python3 -m pip install --no-cache-dir "verl==0.9.1" "transformers==5.9.0" "TransferQueue==0.1.11"

COPY . /opt/verl_ba
RUN python3 -m pip install --no-cache-dir "/opt/verl_ba[paper]"

WORKDIR /opt/verl_ba
