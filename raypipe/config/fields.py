"""Every choice that a person can make about a pipeline: names, types and defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Auto", "PipelineFields"]

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class PipelineFields:
    """How a model is cut, scheduled and joined; ``"auto"`` leaves the choice to the planner.

    Attributes:
        num_stages: stages of the pipeline; "auto" takes as many of scaling_config's workers as are worth
            it, two where nothing was said. Schedules "interleaved" and "zb-v" put num_stages / num_workers on each
            worker, two with "auto" and always in "zb-v". Where scaling_config gives a pair as num_workers, "auto"
            follows the workers there are, and a number is the most there will be (docs/design/0043).
        num_replicas: workers per stage; a list gives one number per stage. Micro-batches are dealt out between the
            replicas of a stage, at least one for each, which sum their gradients before every update. A stage that
            changes buffers in training (batch normalisation) has one, or see replicated_buffers. With "zb-v" and
            "interleaved" one number for all stages: of workers that hold the same ones. In synchronous schedules with
            a stage on each worker "auto" compares data parallelism (one stage with several workers), pipelines and
            stages with replicas by the seconds of a step, within memory, and takes the quickest; the plan shows what
            was compared (docs/design/0061). Where scaling_config gives a pair as num_workers, these are the most there
            will be.
        replicated_buffers: True lets stages whose forwards change buffers (batch normalisation) have replicas too. Each
            keeps the buffers that its own micro-batches made, and those of the first one are saved and evaluated with:
            they are not those that one worker would have.
        num_lanes: into how many lanes micro-batches are dealt out, m into lane m % num_lanes, and their gradients
            summed, lane after lane: to the same bits for any number of replicas up to this one. "auto" is 1, the order
            of plain PyTorch, or with replicas the fewest that give every one of a stage as many lanes; a run that goes
            on keeps them. Every replica holds num_lanes / num_replicas sums of gradients.
        minibatch_size: samples per optimizer step.
        num_microbatches: micro-batches that a mini-batch is cut into; the last may be smaller. "auto"
            follows from the profile, or is 4 per stage with partitioner "parameters".
        loss_reduction: how the loss averages, so that micro-batches can be weighed to make the loss of the mini-batch:
            "mean" over samples (micro-batch i weighs b_i / B), "sum", "valid_tokens" (targets other than -100), or a
            function (target) -> number of items. "auto" finds out when the run is planned: ignore_index, class weights
            and shifted labels from the graph of the loss, tried on real rows; what no weights make right is refused.
            Evaluation weighs mini-batches in the same way, and adds up sums.
        partitioner: "prefix_sum" cuts the profiled operations in their own order, "antichain" in any
            order that the model allows, "hierarchical" with replicas (to plan with, not to run yet);
            "auto" takes the first two. "parameters" profiles nothing and gives every stage about the
            same parameter bytes; a list of module names starts a new stage at each of them.
        profile_budget_s: seconds of processor time that measuring the model may take before the first run; a profile is
            kept, and read where it was made with the same budget. Operations that are alike are measured once, and
            what is not measured is estimated; the plan's reasons say how much. A longer one measures larger
            micro-batches.
        schedule: order of forwards and backwards; "auto" is 1F1B with as much slack as the links ask for or, where the
            measured times of split backwards say so, "zb-h1", and the controller changes it while the run trains.
            "kfkb" runs Ada-Grouper as published: the controller changes k. "zb-h1" splits backwards and delays the part
            that only the weights need: shorter steps for more memory behind the first stage; where max_grad_norm is
            None and no parameter is tied, its steps overlap. "interleaved" and "zb-v" (which splits backwards too) give
            every worker several stages, so that the pipeline fills in smaller pieces: shorter steps for more messages.
            The controller leaves them as they are.
        group_size: k of kFkB: forwards in a row before as many backwards; "auto" begins with 2, and the
            controller turns it.
        slack: r of slack: forwards that each stage starts earlier than the next, 1 being 1F1B; a list gives one
            number per hop. Asynchronous schedules take it too: more micro-batches under way hide slower links,
            and in "pipedream" cost weight versions and make gradients later.
        weight_versions: most weight versions that a stage keeps, in asynchronous schedules ("pipedream" and
            "2bw", which do not run empty between mini-batches). "pipedream" with a number updates as often as
            that many versions allow.
        update_interval: micro-batches per update of the weights, in "pipedream"; 1, or num_lanes where
            there are several, unless weight_versions says otherwise. An update averages the loss over its own samples.
            "per_replica", as published: a stage of R replicas updates every R micro-batches, at R / (replicas of stage
            0) times the learning rate, and the learning rate's schedule counts every num_lanes micro-batches.
        vertical_sync: a micro-batch uses the same weight version on every stage, in "pipedream".
        transport: how boundary tensors travel: "tcp" (sockets; "auto" is the same), "object_store" (Ray's),
            "collective" (gloo; NCCL where workers compute on GPUs), "ray_collective" (a gloo group of
            ray.util.collective, whose waits cannot be ended: for runs that survive no failure and keep their workers).
        link_ports: (lowest, highest) TCP port that workers may listen on for the links, for firewalls; each
            worker on a host takes one of its own. "auto" leaves the choice to the system.
        link_checksum: whether messages carry a checksum of header and payload, so that bits that change on the way are
            found: "auto" on links that leave the host, "on" on all of them, "off". A damaged message is asked for again
            once; a second time, and with "collective" the first time, the link fails by name. Messages of
            "ray_collective" have none.
        codec_forward, codec_backward: what boundary tensors and their gradients travel as; anything but "none"
            is lossy, from "bf16", half as large, to "int4"; see raypipe.engine.codec for how much. "auto" lets the
            controller compress a link, "bf16" or "int8" forward and "bf16" back, while that makes steps shorter by more
            than min_gain.
        codec_sums: what replicas of a stage send of their sums of gradients: "bf16" rounds the sum of each lane, adds
            lanes up in full precision and rounds the total, for half the bytes; "none" changes nothing.
        shard_optimizer: replicas of a stage share out the state of their optimizer, as stage 1 of ZeRO does: each keeps
            that of a slice of every layer and steps the slice, and they exchange parameters in place of gradients. No
            bit changes; of R replicas each holds 1 / R of the state. Nor does the number of bytes, but with codec_sums=
            "bf16" and as many lanes as replicas it is 1.5 times as large, for parameters travel whole. For optimizers
            that step every element by itself (SGD, Adam, AdamW and the like) and synchronous schedules. Where a replica
            is lost, all go back to the newest copies in memory.
        memory_limit_bytes: per worker, of everything that a stage holds; a plan that needs more is
            refused. "auto" keeps to what the devices of a described cluster offer.
        recompute: a stage's backward runs its forward again, so that a micro-batch in flight holds what the stage
            received and no activations: "always" on all stages, "never"; "auto" where the plan would not fit into
            memory otherwise, or is quicker with it. A list has one word (or True and False) per stage, or the numbers
            of the stages that do. It changes no bit.
        precision: what forwards and backwards compute in; parameters, sums of gradients and the optimizer's state are
            fp32 in all of them. "bf16" converts parameters, buffers and floating-point inputs of the model, as
            model.to(torch.bfloat16) does, but not the target of a loss_fn; "bf16-autocast" runs forwards and the loss
            under torch.autocast(cache_enabled=False). "fp16" is as "bf16" in fp16, with a loss that is scaled as
            torch.amp.GradScaler does by default: a step whose gradients overflow is left out on all stages, and the
            scale halved. At a scale of 1 ``on_nonfinite`` decides.
        compile_stages: the backend of torch.compile for the forward of each stage and its backward, in training:
            "inductor" generates kernels, which needs a C++ compiler on workers, or Triton on GPUs; "aot_eager" runs
            torch's own, to the bits of plain PyTorch but for some sums of gradients (a convolution's bias, several
            gradients of one activation; docs/design/0063); "off" compiles nothing. Backwards of compiled stages are one
            piece: schedules that split them are refused, and schedule="auto" is "slack". A stage that draws random
            numbers (dropout) is not compiled, and the plan says so; nor is an nn.Sequential. The first step, and the
            first of every other size of micro-batch, takes seconds more.
        max_grad_norm: clips the gradient norm of the whole model, for which all stages wait for each other before
            every step; None leaves it. Where updates come more often than once per num_stages micro-batches, each
            stage clips its own to this times the root of its share of the parameters.
        retune_interval_steps, link_drift_threshold, min_gain: patience of the controller, which turns k, the slack
            and codecs where these are "auto": most steps between looks (20; 0 never changes anything), relative change
            of a link that is looked at sooner (0.25), relative gain in step time worth a change (0.03).
        retune_microbatches: the controller may change the number of micro-batches too, to another divisor of the
            mini-batch. Then sums are taken in another order and dropout draws other numbers, so that a run depends on
            its links; batch normalisation sees other batches.
        checkpoint_interval_steps: steps between two checkpoints; "auto" saves every ten minutes. A run
            saves at its end and when it is stopped in any case.
        eval_interval_steps: steps between two evaluations on eval_data; None evaluates after the last step, and where
            a checkpoint's score is asked for. Synchronous schedules train to the same bits with any number of them; an
            asynchronous one runs empty for each, as for a checkpoint.
        seed: keys all randomness, together with step and micro-batch; at most 2**62.
        on_nonfinite: what happens where the loss or the gradient norm of a mini-batch is not finite: "stop" ends the
            run, "skip" leaves the step out on all stages. Parameters, optimizer and scheduler stay as they are, buffers
            (batch statistics) keep what the forwards wrote, as in plain PyTorch, and metrics and events say so; ten in
            a row end the run. Stages wait for each other's norms before every step, as they do with max_grad_norm.
        driver_grace_s: seconds that a stage goes on without a word from the driver of its run, which speaks to every
            stage twice a second; then it ends itself and gives its place back. Until then the next driver of that name
            can take it over where it stands, if the driver was killed. The driver gives up a stage that it
            cannot reach for as long. Time in which the one who waits is itself starved or stopped does not count.
        replay: where a run survives failures: "auto" has workers keep what they send, in as much host memory as a copy
            of their state takes, so that one that is lost can do its steps since its last copy again alone, while the
            others stay where they are; that is done where it should be quicker than all going back. Of synchronous
            schedules whose stages have one worker each. "off" has all go back.
        worker_price_per_hour: of renting what one worker runs on, in any currency: the run counts what it costs while
            it has workers, recoveries, waiting and spares included, in metrics, status, ``cost.json`` and
            events.jsonl. None counts nothing, and neither do threads.
        verify: "first_step" runs two micro-batches through the model itself and through its stages before training
            begins, while the actors start, and refuses the run where loss, gradients or buffers differ. That needs
            about twice the memory of the model in this process. "off" trains what was captured, unseen.
        weights_on: where the weights that a new run begins with are made. "client": this process builds the model and
            holds it. "workers": the model, a function, is built here without memory for its parameters, and each worker
            fills those of its own stages: from ``init_from``, which then names safetensors files that all workers can
            read, or else as the model's constructor would, with draws that follow from ``seed`` and not from the number
            of stages; seeds and generators of the constructor's own do not count. The plan is made from shapes, and
            ``verify`` compares nothing. "auto" takes "workers" where ``init_from`` has more bytes than half of this
            machine's memory.

    Raises:
        ConfigError: a field is unknown, ill-typed, out of range, at odds with another one, or has a
            value that this release does not run; the message names field, value and what is allowed.
    """

    num_stages: int | Auto = "auto"
    num_replicas: int | Sequence[int] | Auto = 1
    replicated_buffers: bool = False
    num_lanes: int | Auto = "auto"
    minibatch_size: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    loss_reduction: str | Callable[[Any], float] = "auto"
    partitioner: str | Sequence[str] = "auto"
    profile_budget_s: float = 10.0
    schedule: str = "auto"
    group_size: int | Auto = "auto"
    slack: int | Sequence[int] | Auto = "auto"
    weight_versions: int | Auto = "auto"
    update_interval: int | Literal["per_replica"] | Auto = "auto"
    vertical_sync: bool | Auto = "auto"
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
    replay: str = "auto"
    worker_price_per_hour: float | None = None
    verify: str = "first_step"
    weights_on: str = "auto"
