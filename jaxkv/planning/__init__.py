"""Specs to groups to a plan: everything about the cache that is decided before the first request."""

from jaxkv.planning.capacity import SteadyConcurrency as SteadyConcurrency
from jaxkv.planning.capacity import steady_concurrency as steady_concurrency
from jaxkv.planning.make_plan import make_plan as make_plan
from jaxkv.planning.make_plan import make_stage_plans as make_stage_plans
from jaxkv.planning.make_plan import plan_from_groups as plan_from_groups
from jaxkv.planning.plan import CacheGroup as CacheGroup
from jaxkv.planning.plan import CachePlan as CachePlan
from jaxkv.planning.plan import LayerLocation as LayerLocation
from jaxkv.planning.plan import PlanConfig as PlanConfig
from jaxkv.planning.waste import Waste as Waste
from jaxkv.planning.waste import waste_by_group as waste_by_group
from jaxkv.planning.waste import waste_of as waste_of
