//! What a resource says of others.

use super::{Case, case};

pub(crate) const CASES: &[Case] = &[
    // Other resources.
    case(
        "  - name: prefill",
        "  - name: prefil #!",
        "spec.prefillPools[0].name",
        "no PrefillPool named prefil; did you mean prefill?",
        "",
    ),
    case(
        "  - name: decode",
        "  - name: prefill #!",
        "spec.decodePools[0].name",
        "no DecodePool named prefill; PrefillPool prefill is one, but of the other kind",
        "",
    ),
    case(
        "  - name: decode",
        "  - name: other #!",
        "spec.decodePools[0].name",
        "no DecodePool named other; there are: decode",
        "",
    ),
    case(
        "  - name: decode",
        "  - selector: {matchLabels: {tier: large}} #!",
        "spec.decodePools[0]",
        "no DecodePool of namespace default has these labels",
        "",
    ),
    case(
        "metadata:\n  name: decode",
        "metadata:\n  name: decode\n  namespace: other",
        "spec.decodePools[0].name",
        "no DecodePool named decode; there is one in namespace other",
        "",
    ),
    case(
        "spec:\n  model: tiny\n",
        "spec:\n  model: big\n",
        "spec.prefillPools[0]",
        "PrefillPool prefill serves model tiny, this policy serves big: they must be the same",
        "",
    ),
];
