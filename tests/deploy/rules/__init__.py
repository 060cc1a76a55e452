"""Rules that manifests follow beyond the API's schemas. Each yields what breaks it, with the object's name."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from tests.deploy.objects import Objects
from tests.deploy.rules import cluster, pods, traffic

Rule: TypeAlias = Callable[[Objects], Iterator[str]]

RULES: tuple[Rule, ...] = (
    traffic.services_select_pods,
    traffic.targets_are_services,
    traffic.the_network_lets_through_what_is_needed,
    traffic.callers_are_asked_who_they_are,
    traffic.routes_lead_to_services,
    pods.ports_are_those_of_the_service,
    pods.probes_ask_for_what_exists,
    pods.graces_fit,
    pods.updates_wait_for_models,
    pods.settings_exist,
    pods.images_are_built,
    pods.one_back_end_that_fits,
    pods.checks_see_what_services_see,
    pods.pods_have_no_rights,
    pods.services_refuse_before_memory_is_full,
    pods.volumes_are_there,
    cluster.objects_are_in_one_namespace,
    cluster.secrets_exist,
    cluster.configuration_exists,
    cluster.services_stay_available,
    cluster.autoscaling_has_one_owner,
    cluster.kserve_sees_grpc,
    cluster.monitors_scrape_all_metrics,
)
