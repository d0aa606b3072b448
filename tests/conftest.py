"""Test workers share the cores: one BLAS thread each."""

from threadpoolctl import threadpool_limits

threadpool_limits(limits=1, user_api="blas")
