"""The adapters of the engines that come with Lockstep or torch, and bases for further ones. Inside a rank."""
