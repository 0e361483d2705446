//! Kubernetes' own structures, as far as a pool's template takes them: selectors, tolerations, affinity, volumes, variables.
//!
//! They are written out because no object preserves unknown fields: a misspelt field of an affinity would be dropped in silence
//! otherwise. Field names and meanings are those of Kubernetes' `core/v1`; what is not here cannot be given.

use super::{
    ANY, Field, Form, LABEL_VALUE, Shape, choice, field, integer, list, map, required, text,
};

const KEY: Shape = text(Form::Qualified, 317);
/// Percent of all that a preference can weigh.
const WEIGHT: Shape = integer(1, 100);
static QUANTITY: Shape = Shape::Quantity;
static LABEL_KEY: Shape = text(Form::Qualified, 317);
static NAMESPACE: Shape = text(Form::Label, 63);

static LABEL_REQUIREMENT: Shape = Shape::Object(&[
    required("key", "Name of the label.", KEY),
    required(
        "operator",
        "How the label relates to the values.",
        choice(&["In", "NotIn", "Exists", "DoesNotExist"]),
    ),
    field(
        "values",
        "With In and NotIn: at least one; else none.",
        list(&LABEL_VALUE, 64),
    ),
]);

static LABEL_SELECTOR: &[Field] = &[
    field(
        "matchLabels",
        "Labels that have to be there with these values.",
        map(&LABEL_VALUE, 32),
    ),
    field(
        "matchExpressions",
        "Requirements on labels; all have to hold.",
        list(&LABEL_REQUIREMENT, 32),
    ),
];

static NODE_REQUIREMENT: Shape = Shape::Object(&[
    required("key", "Name of the node's label or field.", KEY),
    required(
        "operator",
        "How it relates to the values.",
        choice(&["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]),
    ),
    field(
        "values",
        "With In and NotIn: at least one; with Gt and Lt: one integer; else none.",
        list(&LABEL_VALUE, 64),
    ),
]);

static NODE_TERM: &[Field] = &[
    field(
        "matchExpressions",
        "Requirements on the node's labels; all have to hold.",
        list(&NODE_REQUIREMENT, 32),
    ),
    field(
        "matchFields",
        "Requirements on the node's fields; all have to hold.",
        list(&NODE_REQUIREMENT, 32),
    ),
];
static NODE_TERM_ITEM: Shape = Shape::Object(NODE_TERM);

static PREFERRED_NODE: Shape = Shape::Object(&[
    required(
        "weight",
        "1 to 100; the sum over what matches ranks nodes.",
        WEIGHT,
    ),
    required(
        "preference",
        "The node that is preferred.",
        Shape::Object(NODE_TERM),
    ),
]);

static POD_TERM: &[Field] = &[
    required(
        "topologyKey",
        "Label of nodes whose equal values make one place.",
        KEY,
    ),
    field(
        "labelSelector",
        "Pods that are meant.",
        Shape::Object(LABEL_SELECTOR),
    ),
    field(
        "namespaces",
        "Where these pods are; default: the pool's own.",
        list(&NAMESPACE, 32),
    ),
    field(
        "namespaceSelector",
        "Namespaces of these pods, by their labels.",
        Shape::Object(LABEL_SELECTOR),
    ),
    field(
        "matchLabelKeys",
        "Labels in which these pods have to be equal to this pod.",
        list(&LABEL_KEY, 16),
    ),
    field(
        "mismatchLabelKeys",
        "Labels in which these pods have to differ from this pod.",
        list(&LABEL_KEY, 16),
    ),
];
static POD_TERM_ITEM: Shape = Shape::Object(POD_TERM);

static PREFERRED_POD: Shape = Shape::Object(&[
    required(
        "weight",
        "1 to 100; the sum over what matches ranks nodes.",
        WEIGHT,
    ),
    required(
        "podAffinityTerm",
        "The pods that are meant.",
        Shape::Object(POD_TERM),
    ),
]);

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

static POD_AFFINITY: &[Field] = &[
    field(
        REQUIRED,
        "Places that are possible; all terms have to hold.",
        list(&POD_TERM_ITEM, 16),
    ),
    field(
        PREFERRED,
        "Places that are better than others.",
        list(&PREFERRED_POD, 16),
    ),
];

/// `Affinity`.
pub(super) static AFFINITY: &[Field] = &[
    field(
        "nodeAffinity",
        "By the nodes' labels.",
        Shape::Object(&[
            field(
                REQUIRED,
                "Nodes that are possible.",
                Shape::Object(&[required(
                    "nodeSelectorTerms",
                    "One of them has to hold.",
                    list(&NODE_TERM_ITEM, 16),
                )]),
            ),
            field(
                PREFERRED,
                "Nodes that are better than others.",
                list(&PREFERRED_NODE, 16),
            ),
        ]),
    ),
    field(
        "podAffinity",
        "Near which pods.",
        Shape::Object(POD_AFFINITY),
    ),
    field(
        "podAntiAffinity",
        "Away from which pods.",
        Shape::Object(POD_AFFINITY),
    ),
];

/// `Toleration`.
pub(super) static TOLERATION: Shape = Shape::Object(&[
    field(
        "key",
        "Name of the taint; left out with operator Exists: every taint.",
        KEY,
    ),
    field("operator", "Default Equal.", choice(&["Equal", "Exists"])),
    field(
        "value",
        "With operator Equal: the taint's value.",
        text(Form::Any, 63),
    ),
    field(
        "effect",
        "Left out: every effect.",
        choice(&["NoSchedule", "PreferNoSchedule", "NoExecute"]),
    ),
    field(
        "tolerationSeconds",
        "With effect NoExecute: seconds until the pod is evicted; left out: never.",
        integer(0, i64::MAX),
    ),
]);

static KEY_TO_PATH: Shape = Shape::Object(&[
    required("key", "Member of the data.", text(Form::Free, 253)),
    required(
        "path",
        "File in the volume, without ..",
        text(Form::Free, 1024),
    ),
    field(
        "mode",
        "Permission bits as a decimal integer: 0644 is 420.",
        integer(0, 511),
    ),
]);

const DEFAULT_MODE: &str = "Permission bits as a decimal integer: 0644 is 420.";
const ITEMS: &str = "Members that become files; default: all.";
const OPTIONAL: &str = "True: the pod starts without it.";

/// `Volume`, of the kinds that a worker has use for. Left out: `projected` and `downwardAPI` (the worker's configuration is one already),
/// `ephemeral` and everything that only an older Kubernetes mounted itself.
pub(super) static VOLUME: Shape = Shape::Object(&[
    required(
        "name",
        "What volumeMounts call it. Names that begin with baton- are Baton's.",
        text(Form::Label, 63),
    ),
    field(
        "configMap",
        "Files from a ConfigMap.",
        Shape::Object(&[
            required("name", "The ConfigMap's name.", text(Form::Free, 253)),
            field("items", ITEMS, list(&KEY_TO_PATH, 64)),
            field("defaultMode", DEFAULT_MODE, integer(0, 511)),
            field("optional", OPTIONAL, Shape::Bool),
        ]),
    ),
    field(
        "secret",
        "Files from a Secret.",
        Shape::Object(&[
            required("secretName", "The Secret's name.", text(Form::Free, 253)),
            field("items", ITEMS, list(&KEY_TO_PATH, 64)),
            field("defaultMode", DEFAULT_MODE, integer(0, 511)),
            field("optional", OPTIONAL, Shape::Bool),
        ]),
    ),
    field(
        "emptyDir",
        "A folder that lives as long as the pod.",
        Shape::Object(&[
            field(
                "medium",
                "Memory: a RAM disk, counted as the container's memory.",
                choice(&["Memory"]),
            ),
            field(
                "sizeLimit",
                "Beyond it the pod is evicted.",
                Shape::Quantity,
            ),
        ]),
    ),
    field(
        "persistentVolumeClaim",
        "A claim of the pool's namespace.",
        Shape::Object(&[
            required("claimName", "The claim's name.", text(Form::Free, 253)),
            field("readOnly", "True: mounted read-only.", Shape::Bool),
        ]),
    ),
    field(
        "hostPath",
        "A folder or file of the node.",
        Shape::Object(&[
            required(
                "path",
                "From the node's root.",
                text(Form::AbsolutePath, 4096),
            ),
            field(
                "type",
                "What has to be there.",
                choice(&[
                    "DirectoryOrCreate",
                    "Directory",
                    "FileOrCreate",
                    "File",
                    "Socket",
                    "CharDevice",
                    "BlockDevice",
                ]),
            ),
        ]),
    ),
    field(
        "csi",
        "A volume that a CSI driver makes for the pod.",
        Shape::Object(&[
            required("driver", "Name of the driver.", text(Form::Free, 253)),
            field(
                "fsType",
                "As ext4; default: the driver's.",
                text(Form::Free, 63),
            ),
            field("readOnly", "True: mounted read-only.", Shape::Bool),
            field(
                "volumeAttributes",
                "What the driver is told.",
                map(&ANY, 64),
            ),
            field(
                "nodePublishSecretRef",
                "Secret for the driver.",
                Shape::Object(&[required(
                    "name",
                    "The Secret's name.",
                    text(Form::Free, 253),
                )]),
            ),
        ]),
    ),
    field(
        "image",
        "An OCI image, mounted read-only.",
        Shape::Object(&[
            required("reference", "The image.", text(Form::Free, 512)),
            field(
                "pullPolicy",
                "When it is pulled.",
                choice(&["Always", "IfNotPresent", "Never"]),
            ),
        ]),
    ),
]);

/// `VolumeMount`.
pub(super) static VOLUME_MOUNT: Shape = Shape::Object(&[
    required("name", "One of the volumes.", text(Form::Label, 63)),
    required(
        "mountPath",
        "Where the worker sees it.",
        text(Form::AbsolutePath, 4096),
    ),
    field("subPath", "Part of the volume.", text(Form::Free, 1024)),
    field("readOnly", "True: the worker cannot write.", Shape::Bool),
]);

/// `requests` and `limits`.
pub(super) static RESOURCES: &[Field] = &[
    field(
        "requests",
        "What the scheduler sets aside, as cpu: 4, memory: 16Gi.",
        map(&QUANTITY, 16),
    ),
    field(
        "limits",
        "What the container may use at most.",
        map(&QUANTITY, 16),
    ),
];

static KEY_REFERENCE: &[Field] = &[
    required("name", "The object's name.", text(Form::Free, 253)),
    required("key", "Member of its data.", text(Form::Free, 253)),
    field("optional", OPTIONAL, Shape::Bool),
];

/// `EnvVarSource`.
pub(super) static VARIABLE_SOURCE: &[Field] = &[
    field(
        "configMapKeyRef",
        "A member of a ConfigMap.",
        Shape::Object(KEY_REFERENCE),
    ),
    field(
        "secretKeyRef",
        "A member of a Secret.",
        Shape::Object(KEY_REFERENCE),
    ),
    field(
        "fieldRef",
        "A field of the pod.",
        Shape::Object(&[
            required("fieldPath", "As status.podIP.", text(Form::Free, 253)),
            field("apiVersion", "Default v1.", text(Form::Free, 63)),
        ]),
    ),
    field(
        "resourceFieldRef",
        "A request or limit of the container.",
        Shape::Object(&[
            required("resource", "As limits.memory.", text(Form::Free, 253)),
            field(
                "containerName",
                "Default: the worker's.",
                text(Form::Label, 63),
            ),
            field("divisor", "Unit of the value; default 1.", Shape::Quantity),
        ]),
    ),
];
