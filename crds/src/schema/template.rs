//! Fields of a pool's `template`: the author's part of each pod.

use super::kubernetes::{AFFINITY, RESOURCES, TOLERATION, VOLUME, VOLUME_MOUNT};
use super::{ANY, Field, Form, LABEL_VALUE, Shape, field, integer, keyed, list, map, text};

/// Linux numbers users and groups so far.
const ID: Shape = integer(0, 4_294_967_294);

pub(super) static TEMPLATE: &[Field] = &[
    field(
        "metadata",
        "Labels and annotations of the pods, beside those that Baton sets.",
        Shape::Object(&[
            field(
                "labels",
                "Names of serving.baton.dev/ and those that Baton sets are not free.",
                map(&LABEL_VALUE, 32),
            ),
            field(
                "annotations",
                "Names of serving.baton.dev/ are not free.",
                map(&ANY, 64),
            ),
        ]),
    ),
    field(
        "nodeSelector",
        "Labels that a node must have.",
        map(&LABEL_VALUE, 32),
    ),
    field(
        "tolerations",
        "Taints of nodes that the pods put up with.",
        list(&TOLERATION, 32),
    ),
    field(
        "affinity",
        "Nodes and pods to be near to or away from; topology.spread and topology.requireSame are added to it.",
        Shape::Object(AFFINITY),
    ),
    field(
        "priorityClassName",
        "The pods' PriorityClass.",
        text(Form::Free, 253),
    ),
    field(
        "serviceAccountName",
        "Default: the namespace's default account; no token of it is mounted.",
        text(Form::Free, 253),
    ),
    field(
        "securityContext",
        "As whom the pods run. Without it Baton's own images run as 65532, and an engine's as the image says.",
        Shape::Object(&[
            field(
                "runAsNonRoot",
                "The kubelet starts nothing as root; the Pod Security Standard restricted asks for it.",
                Shape::Bool,
            ),
            field("runAsUser", "User id of what computes.", ID),
            field("runAsGroup", "Group id of what computes.", ID),
            field("fsGroup", "Group that may write the pod's volumes.", ID),
        ]),
    ),
    field(
        "volumes",
        "Volumes beside Baton's own.",
        keyed(&VOLUME, 32, &["name"]),
    ),
    field(
        "volumeMounts",
        "Where the container that computes has them.",
        keyed(&VOLUME_MOUNT, 32, &["mountPath"]),
    ),
    field(
        "resources",
        "Processor and memory of the container that computes; accelerators are added to it.",
        Shape::Object(RESOURCES),
    ),
];
