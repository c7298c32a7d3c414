# A node of a Flower deployment, from the image of ../Dockerfile: docker build -t fedloom-node -f docker/node.Dockerfile .
# /node is the node's home: its keys, certificates, node.yaml and data (docs/flower.md, steps 3 to 7). Nothing of them is in the image.
#
#   docker run --rm --user "$(id -u)" -v /var/fedloom/site-a:/node fedloom-node --superlink host:9000 \
#     --root-certificates /node/ca.crt --auth-supernode-private-key /node/site-a --host 127.0.0.1 --port 9100 \
#     --ssl-certfile /node/own.pem --ssl-keyfile /node/own.key --ssl-ca-certfile /node/ca.crt --node-config 'home="/node"'
ARG BASE=fedloom
FROM ${BASE}
ENV FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_HOME=/node/.flwr
USER root
RUN mkdir /node && chown 1000 /node
USER 1000
VOLUME /node
WORKDIR /node
ENTRYPOINT ["flower-supernode"]
CMD ["--help"]
