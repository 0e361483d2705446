//! What a pool may say of one kind of engine and not of another.

use super::{Case, case};

/// In the fleet: of the first pool, from its source on.
const FROM_SOURCE: &str =
    "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize: 16";
/// The same, up to the pool's memory for KV.
const TO_MEMORY: &str = "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize: 16\n    maxModelLength: 2048\n  kvPool:\n    blocks: 256\n";

pub(crate) const CASES: &[Case] = &[
    // Baton's own engines.
    case(
        "    blockSize: 16",
        "    dtype: BF16 #!",
        "spec.engine.dtype",
        "found BF16, must be Auto with engine Builtin",
        "spec.engine.dtype: Invalid value: must be Auto with engines Builtin and Simulated",
    ),
    case(
        "    blockSize: 16",
        "    quantization: Fp8 #!",
        "spec.engine.quantization",
        "found Fp8, must be Auto with engine Builtin",
        "spec.engine.quantization: Invalid value: must be Auto with engines Builtin and Simulated",
    ),
    case(
        "    blockSize: 16",
        "    kvCacheDtype: BF16 #!",
        "spec.engine.kvCacheDtype",
        "found BF16, must be Auto or F16 with engine Builtin",
        "spec.engine.kvCacheDtype: Invalid value: must be Auto or F16 with engines Builtin and Simulated",
    ),
    case(
        "    blockSize: 16",
        "    connector: Nixl #!",
        "spec.engine.connector",
        "found Nixl, must be one of Baton with engine Builtin",
        "spec.engine.connector: Invalid value: must be Baton with engines Builtin and Simulated",
    ),
    case(
        "      uri: builtin://tiny?seed=1\n  engine:\n    type: Builtin\n    blockSize",
        "      uri: hf://org/model #!\n  engine:\n    type: Builtin\n    blockSize",
        "spec.model.source.uri",
        "scheme \"hf\" is for engines VLLM and SGLang, which fetch by themselves: give Builtin a .gguf file",
        "spec.model.source.uri: Invalid value: scheme hf is for engines VLLM and SGLang, which fetch by themselves: give Builtin a .gguf file",
    ),
    // Servers.
    case(
        FROM_SOURCE,
        "      uri: builtin://tiny?seed=1 #!\n  engine:\n    type: VLLM\n    blockSize: 16",
        "spec.model.source.uri",
        "schemes pypi and builtin are for engine Builtin: give VLLM a model's folder (hostPath, file://) or hf://ORGANISATION/NAME",
        "spec.model.source.uri: Invalid value: schemes pypi and builtin are for engine Builtin: give a model's folder (hostPath, file://) or hf://ORGANISATION/NAME",
    ),
    case(
        FROM_SOURCE,
        "      uri: hf://model #!\n  engine:\n    type: VLLM\n    blockSize: 16",
        "spec.model.source.uri",
        "found \"hf://model\", must be hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION",
        "spec.model.source.uri: Invalid value: \"hf://model\": must be hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION",
    ),
    case(
        FROM_SOURCE,
        "      hostPath: /models/m\n  engine:\n    type: VLLM\n    connector: Mooncake #!\n    blockSize: 16",
        "spec.engine.connector",
        "found Mooncake, must be one of Nixl, Baton, None with engine VLLM",
        "spec.engine.connector: Invalid value: must be one of Nixl, Baton, None with engine VLLM",
    ),
    case(
        FROM_SOURCE,
        "      hostPath: /models/m\n  engine:\n    type: SGLang\n    connector: Baton #!\n    blockSize: 16",
        "spec.engine.connector",
        "found Baton, must be one of Mooncake, Nixl, None with engine SGLang",
        "spec.engine.connector: Invalid value: must be one of Mooncake, Nixl, None with engine SGLang",
    ),
    case(
        FROM_SOURCE,
        "      hostPath: /models/m\n  engine:\n    type: SGLang\n    kvCacheDtype: F16 #!\n    blockSize: 16",
        "spec.engine.kvCacheDtype",
        "found F16, must be Auto, BF16, F8E4M3 or F8E5M2 with engine SGLang",
        "spec.engine.kvCacheDtype: Invalid value: must be Auto, BF16, F8E4M3 or F8E5M2 with engine SGLang",
    ),
    case(
        FROM_SOURCE,
        "      hostPath: /models/m\n  engine:\n    type: VLLM\n    blockSize: 16",
        "spec.kvPool",
        "bytes and blocks must be left out with engine VLLM, unless its connector is Baton: the engine owns its memory, size it with spec.engine.args",
        "spec.kvPool: Invalid value: bytes and blocks must be left out with engines VLLM and SGLang, unless the connector is Baton",
    ),
    case(
        "    blockSize: 16",
        "    quantization: Q8_0 #!",
        "spec.engine.quantization",
        "\"Q8_0\" is not supported yet by this version; allowed: Auto, None, Fp8, Awq, Gptq",
        "spec.engine.quantization: Unsupported value: \"Q8_0\": supported values: \"Auto\", \"None\", \"Fp8\", \"Awq\", \"Gptq\"",
    ),
    // Devices.
    case(
        TO_MEMORY,
        "      hostPath: /models/m\n  engine:\n    type: VLLM\n  parallelism: {tensor: 4, expert: 2} #!\n  kvPool:\n",
        "spec.parallelism.expert",
        "found 2, must be 1 or 4: vLLM shares experts over all 4 devices of tensor, or over none",
        "spec.parallelism.expert: Invalid value: must be 1 or as many as tensor",
    ),
    case(
        TO_MEMORY,
        "      hostPath: /models/m\n  engine:\n    type: SGLang\n  parallelism: {tensor: 4, expert: 3} #!\n  kvPool:\n",
        "spec.parallelism.expert",
        "found 3, must divide spec.parallelism.tensor, which is 4",
        "spec.parallelism.expert: Invalid value: must divide spec.parallelism.tensor",
    ),
    case(
        TO_MEMORY,
        "      hostPath: /models/m\n  engine:\n    type: VLLM\n    connector: Baton\n  parallelism: {pipeline: 2} #!\n  kvPool:\n",
        "spec.parallelism.pipeline",
        "found 2, must be 1 with connector Baton, which reads one device's blocks: use Nixl",
        "spec.parallelism.pipeline: Invalid value: must be 1 with connector Baton",
    ),
    case(
        TO_MEMORY,
        "      hostPath: /models/m\n  engine:\n    type: VLLM\n  parallelism: {data: 2} #!\n  kvPool:\n",
        "spec.parallelism.data",
        "found 2, must be 1: copies behind one port have caches that no router can tell apart, raise spec.replicas instead",
        "spec.parallelism.data: Invalid value: 2: must be 1: copies behind one port",
    ),
    case(
        TO_MEMORY,
        "      hostPath: /models/m\n  engine:\n    type: SGLang\n  parallelism: {nodesPerReplica: 2} #!\n  kvPool:\n",
        "spec.parallelism.nodesPerReplica",
        "found 2, must be 1: replicas of several nodes are not supported yet by this version",
        "spec.parallelism.nodesPerReplica: Invalid value: 2: must be 1: replicas of several nodes are not supported yet",
    ),
];
