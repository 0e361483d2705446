//! Tables of fields → the structural schema (OpenAPI v3) of a CustomResourceDefinition.

use serde_json::{Map, Value, json};

use crate::check::allowed;
use crate::schema::{Field, Form, Merge, Preset, Shape, Support};

/// A DNS label.
pub(super) const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
const QUALIFIED: &str =
    "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
const VARIABLE: &str = "^[-._A-Za-z][-._A-Za-z0-9]*$";
const QUANTITY: &str = r"^([0-9]+\.?[0-9]*|\.[0-9]+)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi)?$";

/// The schema of an object with these fields.
pub(super) fn object(fields: &[Field]) -> Value {
    let mut properties = Map::new();
    let mut rules = Vec::new();
    for field in fields {
        let mut schema = shape(&field.shape);
        let mut description = field.about.to_owned();
        match &field.default {
            None => {}
            Some(default) => {
                let (value, shown) = preset(*default);
                schema["default"] = value;
                description.push_str(&format!(" Default {shown}."));
            }
        }
        if let Shape::Choice {
            now: [_, ..],
            later: later @ [_, ..],
        } = field.shape
        {
            description.push_str(&format!(" Not supported yet: {}.", later.join(", ")));
        }
        if field.support == Support::Later {
            description = format!("Not supported yet. {description}");
            rules.push(json!({
                "rule": format!("!has(self.{})", field.name),
                "message": "not supported yet by this version; leave the field out",
                "fieldPath": format!(".{}", field.name),
                "reason": "FieldValueForbidden",
            }));
        }
        schema["description"] = description.into();
        properties.insert(field.name.to_owned(), schema);
    }
    let mut schema = json!({"type": "object"});
    if !properties.is_empty() {
        schema["properties"] = properties.into();
    }
    let required: Vec<&str> = fields
        .iter()
        .filter(|field| field.required)
        .map(|field| field.name)
        .collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    if !rules.is_empty() {
        schema["x-kubernetes-validations"] = rules.into();
    }
    schema
}

/// A default as a value, and as people are told of it.
fn preset(default: Preset) -> (Value, String) {
    match default {
        Preset::Integer(value) => (json!(value), value.to_string()),
        Preset::False => (json!(false), "false".to_owned()),
        Preset::Word(word) => (json!(word), word.to_owned()),
        Preset::Words(words) => (json!(words), format!("[{}]", words.join(", "))),
    }
}

fn shape(of: &Shape) -> Value {
    match of {
        Shape::Text { form, longest } => text(of, *form, *longest),
        Shape::Integer { least, most } => {
            let format = if i32::try_from(*most).is_ok() {
                "int32"
            } else {
                "int64"
            };
            let mut schema = json!({"type": "integer", "format": format, "minimum": least});
            if *most < i64::MAX {
                schema["maximum"] = json!(most);
            }
            schema
        }
        Shape::Bool => json!({"type": "boolean"}),
        // A word of a later version is refused as any other is, and not shown among those that are allowed.
        Shape::Choice { now: [], later } => json!({"type": "string", "enum": later}),
        Shape::Choice { now, .. } => json!({"type": "string", "enum": now}),
        Shape::Object(fields) => object(fields),
        Shape::List { of, longest, merge } => {
            let mut schema = json!({"type": "array", "items": shape(of), "maxItems": longest});
            let (kind, keys) = match merge {
                Merge::Atomic => ("atomic", None),
                Merge::Set => ("set", None),
                Merge::Keys(keys) => ("map", Some(keys)),
            };
            schema["x-kubernetes-list-type"] = kind.into();
            if let Some(keys) = keys {
                schema["x-kubernetes-list-map-keys"] = json!(keys);
            }
            schema
        }
        Shape::Map { of, longest } => {
            json!({"type": "object", "additionalProperties": shape(of), "maxProperties": longest})
        }
        Shape::Quantity => json!({
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": true,
            "minimum": 0,
            "pattern": QUANTITY,
            "maxLength": 32,
        }),
        // Only metadata has such fields, and that is Kubernetes' own.
        Shape::Foreign => json!({"type": "object"}),
    }
}

fn text(shape: &Shape, form: Form, longest: usize) -> Value {
    let mut schema = json!({"type": "string", "maxLength": longest});
    if form == Form::Time {
        schema["format"] = "date-time".into();
    } else if form != Form::Any {
        schema["minLength"] = 1.into();
    }
    // By rules rather than patterns: a rule's message can say it in words.
    let rule = match form {
        Form::Any | Form::Free | Form::Time => return schema,
        Form::AbsolutePath => "self.startsWith('/')".to_owned(),
        Form::Model => "!self.matches('[\\\\s\\\\p{Cc}]')".to_owned(),
        Form::Label => format!("self.matches('{LABEL}')"),
        Form::Qualified => format!("self.matches('{QUALIFIED}')"),
        Form::Variable => format!("self.matches('{VARIABLE}')"),
    };
    add_rule(&mut schema, &rule, &allowed(shape));
    schema
}

fn add_rule(schema: &mut Value, rule: &str, message: &str) {
    let rule = json!({"rule": rule, "message": message});
    schema["x-kubernetes-validations"] = json!([rule]);
}
