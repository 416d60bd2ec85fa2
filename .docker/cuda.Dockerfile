# jaxmoe on NVIDIA GPUs. From the root of the repository:
#
#   docker build -f .docker/cuda.Dockerfile -t jaxmoe .
#   docker run --gpus all --ipc host -v "$PWD/runs:/data/runs" jaxmoe pretrain d12
#
# The wheels of jax bring CUDA; the host needs a driver of CUDA 13 and the NVIDIA Container Toolkit.
FROM python:3.13-slim

WORKDIR /opt/jaxmoe
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY .ci/wheel.py .ci/
COPY pallas_kernels pallas_kernels
COPY sharding sharding
COPY jaxmoe jaxmoe
COPY experiments experiments
RUN pip install --no-cache-dir -c constraints.txt '.[train,cuda,serve,parquet,chat]'

# Commands write into runs/ of this directory.
WORKDIR /data
ENTRYPOINT ["jaxmoe"]
CMD ["doctor"]
