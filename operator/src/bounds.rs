//! For tests: whether a status is one that an API server takes.

use serde::Serialize;
use serde_json::Value;

/// Lists, texts and numbers of a planned status are within the bounds of the kind's CustomResourceDefinition.
pub(crate) fn fits(kind: &str, status: &impl Serialize) {
    let definitions = baton_crds::crd::definitions();
    let definition = definitions
        .iter()
        .map(|(_, definition)| definition)
        .find(|definition| definition["spec"]["names"]["kind"] == kind)
        .unwrap();
    let version = &definition["spec"]["versions"][0];
    let schema = &version["schema"]["openAPIV3Schema"]["properties"]["status"];
    assert!(schema["properties"].is_object(), "{schema}");
    walk("status", schema, &serde_json::to_value(status).unwrap());
}

fn walk(path: &str, schema: &Value, value: &Value) {
    let bound = |name: &str| schema[name].as_u64().unwrap_or(u64::MAX);
    match value {
        Value::Array(items) => {
            assert!(
                items.len() as u64 <= bound("maxItems"),
                "{path} has {}",
                items.len()
            );
            for item in items {
                walk(&format!("{path}[]"), &schema["items"], item);
            }
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                let field = &schema["properties"][name];
                assert!(field.is_object(), "{path} has no {name}");
                walk(&format!("{path}.{name}"), field, value);
            }
        }
        Value::String(text) => {
            let length = text.chars().count() as u64;
            assert!(length <= bound("maxLength"), "{path} is {length} long");
        }
        Value::Number(number) => {
            let number = number.as_i64().unwrap();
            let most = schema["maximum"].as_i64().unwrap_or(i64::MAX);
            assert!((0..=most).contains(&number), "{path} is {number}");
        }
        Value::Bool(_) | Value::Null => {}
    }
}
