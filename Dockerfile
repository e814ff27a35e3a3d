# docker build -t loraplex .
# docker run --gpus all -p 8000:8000 loraplex                                  the demo
# docker run --gpus all -p 8000:8000 -v /models:/models loraplex serve /models/m   another model
#
# BASE needs apt, or Python 3.11 or newer with venv; for a machine without a GPU: --build-arg BASE=python:3.12-slim
ARG BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04
FROM ${BASE}

RUN python3 -c 'import ensurepip, sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
    || (apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH

WORKDIR /app
COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
COPY engine /src/engine
COPY kernels /src/kernels
COPY configs/__init__.py configs/py.typed /src/configs/
COPY configs/serve /src/configs/serve
RUN pip install --no-cache-dir /src
COPY configs/serve /app/configs/serve
COPY configs/demo /app/configs/demo

RUN useradd --create-home --uid 10001 loraplex
USER loraplex
ENV LORAPLEX_HOST=0.0.0.0 LORAPLEX_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"LORAPLEX_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["loraplex"]
CMD ["serve", "--config", "configs/serve/demo.yaml"]
