"""Fields of PipelineConfig: names, types, defaults and meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class PipelineFields:
    """Settings of a pipeline: partition, schedule, links and training; ``"auto"`` leaves a choice to the planner.

    Attributes:
        num_stages: number of stages. "auto" uses as many of scaling_config's workers as shorten the step, or two if
            scaling_config has no num_workers. Schedules "interleaved" and "zb-v" put num_stages / num_workers stages on
            each worker: two if num_stages is "auto", and always two in "zb-v". If num_workers is a pair, "auto" follows
            the number of available workers, and a number is a maximum (docs/design/0037).
        num_replicas: workers per stage, one number for all stages or a list with one for each. Replicas share the
            micro-batches of their stage, and sum their gradients before every update. A stage that changes buffers in
            training (batch normalisation) has one worker, unless replicated_buffers is set. In "zb-v" and "interleaved"
            all stages have equally many. "auto", for synchronous schedules with one stage on each worker, takes the
            quickest of data parallelism, pipelines and stages with replicas that fits into memory; the plan shows the
            comparison (docs/design/0009). If scaling_config gives a pair as num_workers, these numbers are maxima.
        replicated_buffers: True allows replicas of stages whose forwards change buffers. Each replica keeps the buffers
            of its own micro-batches; those of the first are saved and used in evaluation. They differ from the buffers
            that one worker would have.
        num_lanes: number of partial sums of gradients (lanes). Micro-batch m of a step is added to lane m % num_lanes,
            and lanes are added up in order, so that results are bitwise equal for any number of replicas up to this
            one. "auto" is 1, which adds in the order of plain PyTorch, or with replicas the least common multiple of
            their numbers. A resumed run keeps its lanes. Every replica holds num_lanes / num_replicas sums of
            gradients.
        minibatch_size: samples per optimizer step.
        num_microbatches: micro-batches of a mini-batch; the last may be smaller. "auto" follows from the profile, or is
            4 per stage with partitioner "parameters".
        loss_reduction: items over which the loss averages. Their numbers weight the losses of micro-batches, which then
            add up to that of the mini-batch: "mean" over samples, "sum", "valid_tokens" (targets other than -100), or a
            function (target) -> number of items. "auto" infers them from the graph of the loss (ignore_index, class
            weights, shifted labels), tries them on real rows, and refuses a loss that no weights make, such as the load
            balancing of experts. "per_microbatch" accepts such a loss: it is computed for each micro-batch, weighted by
            the items of its main part (labels of its cross entropy, else samples). Evaluation weights mini-batches in
            the same way. If it is given, a model of 2**24 parameters or more is not computed to check it: a loss_fn is
            tried on random outputs instead, and of a model's own loss the graph is read.
        loss_over: samples over which the loss is computed. "microbatch" computes the loss of each micro-batch and
            weights it by ``loss_reduction``. "minibatch" computes it once, over the outputs of all micro-batches, as
            losses need that compare samples with each other (contrastive losses); all forwards of a step then precede
            its backwards (schedule "gpipe"), so that every stage holds all micro-batches, and replicas of the last
            stage the outputs of all. "auto" is "microbatch", or "minibatch" if no weights of micro-batches make the
            loss.
        partitioner: "prefix_sum" cuts the profiled operations in execution order, "antichain" in any order that their
            dependencies allow; "auto" takes the better of the two. "parameters" profiles nothing and gives all stages
            about equal parameter bytes. A list of module names begins a new stage at each of these modules.
        profile_budget_s: seconds of processor time for measuring the model before the first run. A profile is cached,
            and reused with the same budget. A larger budget measures larger micro-batches, and estimates fewer
            operations; the plan's reasons give the numbers.
        schedule: order of forwards and backwards. "auto" is 1F1B with as much slack as the links require, or "zb-h1" if
            measured times favour it; the controller changes it while the run trains. "kfkb" is Ada-Grouper as
            published: the controller changes k. "zb-h1" delays the gradients of weights: shorter steps for more memory
            after the first stage; if max_grad_norm is None and no parameter is tied, its steps overlap. "interleaved"
            and "zb-v" (which splits backwards as "zb-h1" does) give every worker several stages: shorter steps for more
            messages. The controller does not change these two.
        group_size: k of "kfkb": number of forwards in a row, before as many backwards; "auto" begins with 2, and the
            controller changes it.
        slack: number of forwards that a stage runs ahead of the next stage; 1 is 1F1B. A list gives one number per link
            between neighbouring stages. More micro-batches in flight hide slower links. In "pipedream" they need more
            weight versions, and gradients get staler.
        weight_versions: maximum number of weight versions on a stage, in schedules that do not drain the pipeline
            between mini-batches ("pipedream", "2bw"). With a number, "pipedream" updates as often as that many versions
            allow.
        update_interval: micro-batches per update of the weights, in "pipedream"; 1, or num_lanes if there are several,
            unless weight_versions is set. An update averages the loss over its own samples. "per_replica", as
            published: a stage of R replicas updates every R micro-batches, at R / (replicas of stage 0) times the
            learning rate, whose schedule counts every num_lanes micro-batches.
        vertical_sync: a micro-batch uses the same weight version on every stage, in "pipedream".
        stale_correction: correction for stale gradients, in "pipedream" and "2bw". With "predict" a stage whose
            gradients are d updates late computes with w + d (w - w before the last update), and holds two more copies
            of its weights. "discount", in "pipedream", divides the learning rate of update t by d ** (1 - t /
            discount_updates) if d is above 1, until update discount_updates. See docs/schedules.md for sources.
        discount_updates: number of updates after which the discount of the learning rate has faded, if stale_correction
            is "discount". PipeMare takes about a quarter of the updates before the first drop of the learning rate.
        transport: transport of boundary tensors: "tcp" (sockets), "auto" (the same, and shared memory for large
            messages between workers of one host; CUDA IPC between GPUs of a host), "object_store" (Ray's), "collective"
            (gloo; NCCL if workers compute on GPUs).
        link_ports: (lowest, highest) TCP port for the links, for firewalls; each worker on a host takes one of its own.
            "auto" leaves the choice to the system.
        link_checksum: checksum of every message, to detect corrupted bits: "auto" on links that leave the host, "on" on
            all, "off". A damaged message ends its link with an error; with FailureConfig(max_failures=...) the run
            opens its links again and repeats the step.
        codec_forward, codec_backward: encoding of boundary tensors and of their gradients on links; all but "none" are
            lossy, from "bf16", half as large, to "tah3", 8.8 times smaller; see raypipe.engine.codec for errors. "auto"
            lets the controller compress a link, "bf16" or "int8" forward and "bf16" back, while that makes steps
            shorter by more than min_gain.
        codec_sums: encoding of the gradient sums that replicas of a stage exchange: "bf16" rounds the sum of each lane,
            adds lanes up in full precision and rounds the total, for half the bytes; "none" changes nothing.
        shard_optimizer: True shards the state of a stage's optimizer over its replicas, as stage 1 of ZeRO does: each
            of R replicas holds 1 / R of the state, steps a slice of every layer, and sends parameters instead of
            gradients. No bit changes. As many bytes are sent; only codec_sums="bf16" with as many lanes as replicas
            sends 1.5 times as many, because parameters stay in full precision. For optimizers that step every element
            by itself (SGD, Adam, AdamW and the like) and synchronous schedules. If a replica is lost, all roll back to
            the newest in-memory copies.
        memory_limit_bytes: limit per worker, of everything that a stage holds; a plan that needs more is refused.
            "auto" is the memory of the devices of a described cluster.
        recompute: activation recomputation: a stage's backward runs its forward again, so that a micro-batch in flight
            holds the stage's inputs instead of activations. "always" on all stages, "never", or "auto": if the plan
            would not fit into memory otherwise, or is quicker with it. A list has one word (or True and False) per
            stage, or the numbers of the recomputing stages. It changes no bit.
        precision: number format of forwards and backwards; parameters, sums of gradients and the optimizer's state are
            always fp32. "bf16" converts parameters, buffers and floating-point inputs of the model, as
            model.to(torch.bfloat16) does, but not the target of a loss_fn. "bf16-autocast" runs forwards and the loss
            under torch.autocast(cache_enabled=False). "fp16" is as "bf16" in fp16, with a loss that is scaled as by
            torch.amp.GradScaler: a step whose gradients overflow is skipped on all stages, and the scale is halved. At
            a scale of 1 ``on_nonfinite`` decides.
        compile_stages: backend of torch.compile for the stages in training. "inductor" generates kernels, which needs a
            C++ compiler on workers, or Triton on GPUs. "aot_eager" runs torch's kernels, bitwise equal to plain PyTorch
            except for some sums of gradients (docs/design/0002). "off" compiles nothing. Schedules that split backwards
            are refused, and schedule="auto" is "slack". A stage that draws random numbers (dropout) is not compiled, as
            the plan notes; nor is an nn.Sequential. The first step of every size of micro-batch takes seconds more.
        cuda_graphs: True records the forwards and backwards of the stages as CUDA graphs, so that each is one launch
            instead of one per kernel; it changes no bit. It needs GPUs, a synchronous schedule that does not split
            backwards, and a traced model without torch.cond and reads of values (docs/design/0085). Only the largest
            shape of a micro-batch is recorded; a smaller last one runs as without.
        max_grad_norm: clips the gradient norm of the whole model, which makes every step a barrier over all stages;
            None does not clip. If updates come more often than once per num_stages micro-batches, each stage clips its
            own norm to this times the root of its share of the parameters.
        retune_interval_steps, link_drift_threshold, min_gain: thresholds of the controller, which changes k, the slack
            and codecs if these are "auto": most steps between searches (20; 0 never changes anything), relative change
            of a link that causes an earlier search (0.25), relative gain in step time worth a change (0.03).
        retune_microbatches: True lets the controller change the number of micro-batches too, to another divisor of the
            mini-batch. The results then depend on the links: sums have another order, dropout gets other random
            numbers, and batch normalisation other batches.
        checkpoint_interval_steps: steps between two checkpoints; "auto" saves every ten minutes. A run always saves at
            its end and when it is stopped.
        eval_interval_steps: steps between two evaluations on eval_data; None evaluates after the last step, and if a
            checkpoint needs a score. An asynchronous schedule drains the pipeline for each, which changes its results.
        seed: keys all randomness, together with step and micro-batch; at most 2**62.
        on_nonfinite: action if the loss or the gradient norm of a mini-batch is NaN or infinite: "stop" ends the run,
            "skip" skips the step on all stages. Parameters, optimizer and scheduler then stay as they are, buffers keep
            what the forwards wrote, and metrics and events record it; ten skips in a row end the run. Every step waits
            for the norms of all stages, as with max_grad_norm.
        driver_grace_s: seconds that a stage runs without a heartbeat from the driver of its run, which sends two per
            second; then the stage exits and releases its resources. Until then a new driver of that name can take it
            over. The driver gives up a stage that it cannot reach for as long. Time in which the waiting process itself
            is starved or stopped does not count.
        resource_timeout_s: seconds for which a run waits for workers, when it begins and when it resumes after a loss;
            then it ends with an error. Its status names what is missing, and the holders of the CPUs or GPUs. None
            waits for ever. "auto" does so if an autoscaler may add nodes, or if scaling_config gives a pair as
            num_workers, and waits 10 minutes otherwise; but only 30 s for the replacement of a lost worker if the run
            can continue with fewer stages.
        worker_price_per_hour: price of the resources of one worker, in any currency. The run reports its cost in
            metrics, status, ``cost.json`` and events.jsonl, with recoveries, waiting and spares. None reports no cost,
            and neither do runs in threads.
        verify: "first_step" runs two micro-batches through the model and through its stages before training begins, and
            refuses the run if loss, gradients or buffers differ; this process needs about twice the memory of the
            model. "off" trains the captured stages without that check; if loss_reduction is given too, a model of 2**24
            parameters or more whose forward changes no buffer is not computed before the first step at all; that step
            or the first evaluation raises what a trial of two rows would have (docs/design/0056).
        weights_on: place where the initial weights of a new run are made. "client": this process builds the model and
            holds it. "workers": the model, a function, is built here without memory for its parameters, and each worker
            fills those of its own stages: from ``init_from``, which then names safetensors files that all workers can
            read, or else by the initialisers of the modules: ``reset_parameters()``, ``init_weights()``, or a
            ``_init_weights(module)`` as in transformers. Their random numbers follow from ``seed`` and the module, not
            from the stages. A parameter that none of them sets, or that the constructor sets elsewhere, is refused by
            name. The plan is made from shapes, and ``verify`` compares nothing. "auto" is "workers" if ``init_from``
            has more bytes than half of the memory that this process may use.

    Raises:
        ConfigError: a field is unknown, ill-typed, out of range, at odds with another one, or has a value that this
            release does not run; the message names field, value and what is allowed.
    """

    num_stages: int | Auto = "auto"
    num_replicas: int | Sequence[int] | Auto = 1
    replicated_buffers: bool = False
    num_lanes: int | Auto = "auto"
    minibatch_size: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    loss_reduction: str | Callable[[Any], float] = "auto"
    loss_over: str = "auto"
    partitioner: str | Sequence[str] = "auto"
    profile_budget_s: float = 10.0
    schedule: str = "auto"
    group_size: int | Auto = "auto"
    slack: int | Sequence[int] | Auto = "auto"
    weight_versions: int | Auto = "auto"
    update_interval: int | Literal["per_replica"] | Auto = "auto"
    vertical_sync: bool | Auto = "auto"
    stale_correction: str = "none"
    discount_updates: int = 1000
    transport: str = "auto"
    link_ports: tuple[int, int] | Auto = "auto"
    link_checksum: str = "auto"
    codec_forward: str = "none"
    codec_backward: str = "none"
    codec_sums: str = "none"
    shard_optimizer: bool = False
    memory_limit_bytes: int | Auto = "auto"
    recompute: str | Sequence[str | bool | int] = "auto"
    precision: str = "fp32"
    compile_stages: str = "off"
    cuda_graphs: bool = False
    max_grad_norm: float | None = None
    retune_interval_steps: int | Auto = "auto"
    link_drift_threshold: float | Auto = "auto"
    min_gain: float | Auto = "auto"
    retune_microbatches: bool = False
    checkpoint_interval_steps: int | Auto = "auto"
    eval_interval_steps: int | None = None
    seed: int = 0
    on_nonfinite: str = "stop"
    driver_grace_s: float = 60.0
    resource_timeout_s: float | Auto | None = "auto"
    worker_price_per_hour: float | None = None
    verify: str = "first_step"
    weights_on: str = "auto"
