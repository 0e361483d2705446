//! Schema and types say the same: every field that this version honours survives the way through the type, and the type
//! has no field that the schema does not know.

use serde_json::{Map, Value, json};

use super::policy::ROUTE_POLICY;
use super::pool::POOL;
use super::{Field, Form, Shape, Support};
use crate::{PoolSpec, RoutePolicySpec};

/// An object with every honoured field, each of the lowest value (`last`: the last choice) that the schema allows.
fn full(fields: &[Field], last: bool) -> Value {
    let mut object = Map::new();
    for field in fields
        .iter()
        .filter(|field| field.support == Support::Everywhere)
    {
        if let Some(value) = sample(&field.shape, last) {
            object.insert(field.name.to_owned(), value);
        }
    }
    Value::Object(object)
}

fn sample(shape: &Shape, last: bool) -> Option<Value> {
    Some(match shape {
        Shape::Text {
            form: Form::AbsolutePath,
            ..
        } => json!("/a"),
        Shape::Text { .. } => json!("a"),
        Shape::Integer { least, most } => json!(if last { *most } else { *least }),
        Shape::Bool => json!(true),
        Shape::Choice { now, .. } => json!(if last { now.last()? } else { now.first()? }),
        // All of its fields are for a cluster: nothing to hold.
        Shape::Object(fields) if full(fields, last) == json!({}) => return None,
        Shape::Object(fields) => full(fields, last),
        Shape::List { of, .. } => json!([sample(of, last)?]),
        Shape::Map { of, .. } => json!({"key": sample(of, last)?}),
        Shape::Foreign => return None,
    })
}

#[test]
fn every_field_of_the_schema_is_held_by_its_type() {
    for last in [false, true] {
        let written = full(POOL, last);
        let spec: PoolSpec = serde_json::from_value(written.clone()).unwrap();
        similar(
            &written,
            &serde_json::to_value(spec).unwrap(),
            "spec",
            &["image", "persistentVolumeClaim"],
        );

        let written = full(ROUTE_POLICY, last);
        let spec: RoutePolicySpec = serde_json::from_value(written.clone()).unwrap();
        similar(&written, &serde_json::to_value(spec).unwrap(), "spec", &[]);
    }
}

fn similar(written: &Value, held: &Value, path: &str, for_a_cluster: &[&str]) {
    match (written, held) {
        (Value::Object(written), Value::Object(held)) => {
            for (name, value) in written {
                let path = format!("{path}.{name}");
                let other = held
                    .get(name)
                    .unwrap_or_else(|| panic!("the type drops {path}"));
                similar(value, other, &path, for_a_cluster);
            }
            for name in held.keys() {
                assert!(
                    written.contains_key(name) || for_a_cluster.contains(&name.as_str()),
                    "the schema does not know {path}.{name}"
                );
            }
        }
        (written, held) => assert_eq!(written, held, "{path}"),
    }
}
