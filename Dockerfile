# hf_vit on CPUs:
#   docker build -t hf-vit .
#   docker run --rm --user "$(id -u)" -v "$PWD:/data" hf-vit predict out/demo image.png
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY conversion conversion
COPY model_cards model_cards
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[train,export]"
ENV HF_HOME=/tmp/huggingface
WORKDIR /data
RUN hf-vit --version
ENTRYPOINT ["hf-vit"]
CMD ["--help"]
