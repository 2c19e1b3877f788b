# docker build -t megatron_lite .
# docker run --gpus all --shm-size 16g -v "$PWD/runs:/megatron_lite/runs" -e SAVE=runs/gpt_125m megatron_lite bash examples/gpt_125m.sh
FROM python:3.12-slim
# gcc and g++: --compile builds kernels on the machine it runs on.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron_lite
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY pretrain_gpt.py setup.py README.md LICENSE ./
COPY megatron_lite megatron_lite
COPY tools tools
COPY examples examples
# tools/env.sh takes this interpreter as it is.
ENV PYTHON=/usr/local/bin/python
CMD ["python", "pretrain_gpt.py", "--help"]
