//! What routers refuse, and how much a status has room for.

use super::*;

#[test]
fn the_last_good_generation_is_what_a_router_that_refuses_serves_by() {
    let mut observed = good();
    assert_eq!(plan(&observed).status.last_good_generation, Some(4));
    observed.policy.status = Some(RoutePolicyStatus {
        last_good_generation: Some(2),
        ..RoutePolicyStatus::default()
    });
    observed.routers = vec![
        router("router-0", Some(4), None),
        router("router-1", Some(3), Some("weights")),
    ];
    assert_eq!(plan(&observed).status.last_good_generation, Some(3));
    // One that has just started has none at all.
    observed.routers[1] = router("router-1", None, Some("weights"));
    assert_eq!(plan(&observed).status.last_good_generation, Some(2));
}

#[test]
fn a_status_fits_its_schema_however_many_pools_and_routers_there_are() {
    let mut observed = good();
    let pools = |role, letter: &str| -> Vec<PoolView> {
        let one = |index| pool(role, &format!("{letter}{index}"), |_| ());
        (0..20)
            .map(|index| ready(one(index), &format!("r{index}"), &"k".repeat(128)))
            .collect()
    };
    observed.pools = pools(PoolRole::Prefill, "p");
    observed.pools.extend(pools(PoolRole::Decode, "d"));
    let names = |letter: &str| -> Vec<Value> {
        (0..20)
            .map(|index| json!({"name": format!("{letter}{index}")}))
            .collect()
    };
    observed.policy = policy(|spec| {
        spec["prefillPools"] = names("p").into();
        spec["decodePools"] = names("d").into();
    });
    let reason = "é".repeat(3000);
    observed.routers = (0..100)
        .map(|index| router(&format!("router-{index}"), Some(4), Some(&reason)))
        .collect();
    let status = plan(&observed).status;
    assert_eq!((status.pairs.len(), status.routers.len()), (256, 64));
    crate::bounds::fits("RoutePolicy", &status);
}
