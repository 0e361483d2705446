//! Fields and kinds that there are not.

use super::{Case, case};

pub(crate) const CASES: &[Case] = &[
    // Names of fields.
    case(
        "    blockSize: 16",
        "    blocksize: 16 #!",
        "spec.engine.blocksize",
        "unknown field, did you mean blockSize? (allowed: type, image, args, env, dtype,",
        "unknown field \"spec.engine.blocksize\"",
    ),
    case(
        "  replicas: 1",
        "  replica: 1 #!",
        "spec.replica",
        "unknown field, did you mean replicas? (allowed: replicas, model, engine,",
        "unknown field \"spec.replica\"",
    ),
    case(
        "    leaseSeconds: 30",
        "    leaseTimeout: 30 #!",
        "spec.kvPool.leaseTimeout",
        "unknown field (allowed: bytes, blocks, leaseSeconds, transports)",
        "unknown field \"spec.kvPool.leaseTimeout\"",
    ),
    case(
        "  mode: Conditional",
        "  modus: Conditional #!",
        "spec.modus",
        "unknown field, did you mean mode?",
        "unknown field \"spec.modus\"",
    ),
    case(
        "    marginPercent: 10",
        "    margin: 10 #!",
        "spec.cost.margin",
        "unknown field (allowed: preset, weights,",
        "unknown field \"spec.cost.margin\"",
    ),
    case(
        "  name: tiny\nspec:\n  model: tiny",
        "  name: tiny\n  lables: {} #!\nspec:\n  model: tiny",
        "metadata.lables",
        "unknown field, did you mean labels?",
        "unknown field \"metadata.lables\"",
    ),
    case(
        "  - name: decode",
        "  - pool: decode #!",
        "spec.decodePools[0].pool",
        "unknown field (allowed: name, selector)",
        "unknown field \"spec.decodePools[0].pool\"",
    ),
    case(
        "  fallback:\n    replans: 1",
        "  fallback:\n    localRecompute:\n      maxPercents: 3 #!",
        "spec.fallback.localRecompute.maxPercents",
        "did you mean maxPercent?",
        "unknown field \"spec.fallback.localRecompute.maxPercents\"",
    ),
    // Kinds and versions.
    case(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool",
        "apiVersion: serving.baton.dev/v1 #!\nkind: DecodePool",
        "apiVersion",
        "found \"serving.baton.dev/v1\", must be serving.baton.dev/v1alpha1",
        "no matches for kind \"DecodePool\" in version \"serving.baton.dev/v1\"",
    ),
    case(
        "kind: DecodePool",
        "kind: DecodePools #!",
        "kind",
        "must be one of PrefillPool, DecodePool, RoutePolicy; did you mean DecodePool?",
        "no matches for kind \"DecodePools\" in version \"serving.baton.dev/v1alpha1\"",
    ),
    case(
        "kind: PrefillPool",
        "kind: ConfigMap #!",
        "kind",
        "found \"ConfigMap\", must be one of PrefillPool, DecodePool, RoutePolicy",
        "no matches for kind \"ConfigMap\" in version \"serving.baton.dev/v1alpha1\"",
    ),
];
