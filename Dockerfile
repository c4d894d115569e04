# syntax=docker/dockerfile:1
#
#   docker build --tag outboxd .
#   docker run --rm --network host outboxd run postgres://app@127.0.0.1/shop --brokers 127.0.0.1:9092 --topic orders
#
# The result is the program on Debian's C library, OpenSSL and certificates, without a shell, run by a user without rights.

FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
# The registry and what was compiled stay for the next build; the program is taken out of that cache at once.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    cargo build --release --locked --bin outboxd \
    && install --strip target/release/outboxd /outboxd

FROM gcr.io/distroless/cc-debian12:nonroot
LABEL org.opencontainers.image.title="outboxd" \
      org.opencontainers.image.description="Moves a transactional outbox to Kafka by reading the database's own log" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY --from=build /outboxd /usr/bin/outboxd
# Asked from outside the container, so not on the loopback address alone; what changes state wants OUTBOXD_ADMIN_TOKEN.
ENV OUTBOXD_ADMIN=0.0.0.0:7420 \
    OUTBOXD_LOG_FORMAT=json
EXPOSE 7420
# Unhealthy is also who waits for a database or a broker. Where unhealthy containers are killed, which helps nobody who
# waits, ask `--check=live` instead.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["/usr/bin/outboxd", "status", "--check"]
STOPSIGNAL SIGTERM
USER 65532:65532
ENTRYPOINT ["/usr/bin/outboxd"]
CMD ["--help"]
